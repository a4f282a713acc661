// An array between its buffers: a product of (M, K) by (K, N), fold after fold.
//
// Buffers are cut into banks, one for each row (left), each column (top) and each column of results. With STATIONARY = 0
// (os) left bank i holds rows m = i mod ROWS of the first operand at (m / ROWS) * K + k. With STATIONARY = 1 (ws) it holds
// columns k = i mod ROWS at (k / ROWS) * M + m. Top bank j holds columns n = j mod COLS of the second operand at
// (n / COLS) * K + k; result bank j those of the result at (n / COLS) * M + m. `is` is ws of the transposed product.
//
// No length of a fold is written down here: a fold ends when its last operand reaches the far corner.
module accelerator #(
  parameter ROWS = 8, parameter COLS = 8, parameter WIDTH = 8, parameter SUM = 32,
  parameter STATIONARY = 0, parameter ADDRESS = 16
) (
  input clk, reset, start,
  input [31:0] m, n, k,
  input load_left, load_top,
  input [31:0] load_bank,
  input [ADDRESS-1:0] load_address,
  input signed [WIDTH-1:0] load_data,
  input [31:0] result_bank,
  input [ADDRESS-1:0] result_address,
  output signed [SUM-1:0] result_data,   // one cycle after the address, while not busy
  output busy,
  // what was counted
  output reg [63:0] compute_cycles,      // from the first fold's begin to the last fold's end
  output reg [63:0] busy_cycles,         // until the last result is in its buffer
  output reg [63:0] folds, left_reads, top_reads, result_writes
);
  // the fold: where it begins (outer tile of columns, inner tile), and the step in it
  reg running;
  reg [31:0] step, inner, outer;
  reg [ADDRESS-1:0] left_base, top_base, result_base;
  wire finished;
  wire [31:0] inner_size = STATIONARY ? k : m;
  wire [31:0] stream = STATIONARY ? m : k;
  wire [31:0] live_inner = inner_size - inner < ROWS ? inner_size - inner : ROWS;
  wire [31:0] live_cols = n - outer < COLS ? n - outer : COLS;
  wire last_inner = inner + ROWS >= inner_size;
  wire last_fold = last_inner && outer + COLS >= n;

  // what the next cycle's fold and step are: buffers are read a cycle ahead
  wire begins = start && !running;
  reg [31:0] next_step, next_inner, next_outer;
  reg [ADDRESS-1:0] next_left_base, next_top_base, next_result_base;
  always @* begin
    next_step = step + 1;
    next_inner = inner;
    next_outer = outer;
    next_left_base = left_base;
    next_top_base = top_base;
    next_result_base = result_base;
    if (begins) begin
      next_step = 0; next_inner = 0; next_outer = 0;
      next_left_base = 0; next_top_base = 0; next_result_base = 0;
    end else if (finished) begin
      next_step = 0;
      if (last_inner) begin
        next_inner = 0;
        next_outer = outer + COLS;
        next_left_base = 0;
        next_top_base = top_base + k[ADDRESS-1:0];
        next_result_base = result_base + m[ADDRESS-1:0];
      end else begin
        next_inner = inner + ROWS;
        next_left_base = left_base + stream[ADDRESS-1:0];
      end
    end
  end
  always @(posedge clk) begin
    if (reset) running <= 0;
    else running <= begins || (running && !(finished && last_fold));
    step <= next_step; inner <= next_inner; outer <= next_outer;
    left_base <= next_left_base; top_base <= next_top_base; result_base <= next_result_base;
  end

  // what is fed in this step
  wire loading = running && STATIONARY != 0 && step < ROWS;
  wire [31:0] at = STATIONARY ? step - ROWS : step;
  wire feeding = running && !loading && at < stream;
  wire [31:0] next_at = STATIONARY ? next_step - ROWS : next_step;
  wire [31:0] loaded_row = inner + ROWS - 1 - step;          // the last row is shifted in first
  wire [31:0] next_loaded_row = next_inner + ROWS - 1 - next_step;
  wire [31:0] next_top_at = STATIONARY ? next_loaded_row : next_step;
  wire top_live = STATIONARY ? loading && loaded_row < k : feeding;

  wire [ROWS*WIDTH-1:0] left;
  wire [COLS*WIDTH-1:0] top;
  genvar i, j;
  generate
    for (i = 0; i < ROWS; i = i + 1) begin : left_banks
      wire signed [WIDTH-1:0] data;
      bank #(WIDTH, ADDRESS) b (clk, next_left_base + next_at[ADDRESS-1:0], data,
                                load_left && load_bank == i, load_address, load_data);
      assign left[i*WIDTH +: WIDTH] = feeding && i < live_inner ? data : {WIDTH{1'b0}};
    end
    for (j = 0; j < COLS; j = j + 1) begin : top_banks
      wire signed [WIDTH-1:0] data;
      bank #(WIDTH, ADDRESS) b (clk, next_top_base + next_top_at[ADDRESS-1:0], data,
                                load_top && load_bank == j, load_address, load_data);
      assign top[j*WIDTH +: WIDTH] = top_live && j < live_cols ? data : {WIDTH{1'b0}};
    end
  endgenerate

  // results into their banks
  wire [COLS-1:0] write;
  wire [COLS*SUM-1:0] results, stored;
  wire draining;
  assign busy = running || draining;
  assign result_data = stored[result_bank*SUM +: SUM];
  generate
    if (STATIONARY) begin : stationary
      wire [COLS-1:0] falls;
      wire [COLS*SUM-1:0] bottom;
      reg adds, falling;                   // this fold's sums go onto those of the fold before
      reg [31:0] written_cols;
      reg [ADDRESS-1:0] written_base;
      array_stationary #(ROWS, COLS, WIDTH, SUM) array (
        clk, loading, feeding, feeding && at == stream - 1, left, top, finished, falls, bottom);
      // the last sum of a fold is written in the first cycle of the next
      always @(posedge clk) begin
        falling <= finished;
        if (running && step == 0) begin
          adds <= inner != 0;
          written_cols <= live_cols;
          written_base <= result_base;
        end
      end
      assign draining = falling;
      for (j = 0; j < COLS; j = j + 1) begin : result_banks
        reg [ADDRESS-1:0] row;
        wire [ADDRESS-1:0] next_row = begins ? 0 : !falls[j] ? row : {16'b0, row} + 1 == m ? 0 : row + 1;
        wire signed [SUM-1:0] so_far;
        always @(posedge clk) row <= next_row;
        assign write[j] = falls[j] && j < written_cols;
        assign results[j*SUM +: SUM] = bottom[j*SUM +: SUM] + (adds ? so_far : {SUM{1'b0}});
        bank #(SUM, ADDRESS) b (clk, busy ? written_base + next_row : result_address, so_far,
                                write[j], written_base + row, results[j*SUM +: SUM]);
        assign stored[j*SUM +: SUM] = so_far;
      end
    end else begin : outputs
      reg capture, leaves;
      reg [31:0] row, written_rows, written_cols;
      reg [ADDRESS-1:0] written_base;
      array_os #(ROWS, COLS, WIDTH, SUM) array (
        clk, feeding && at == 0, feeding && at == stream - 1, capture, leaves, left, top, finished, results);
      always @(posedge clk) begin
        capture <= finished && !reset;
        if (finished) begin                // of the fold that ends
          written_rows <= live_inner;
          written_cols <= live_cols;
          written_base <= result_base + inner[ADDRESS-1:0];
        end
        if (reset) leaves <= 0;
        else if (capture) begin
          leaves <= 1;
          row <= ROWS - 1;
        end else if (leaves) begin
          leaves <= row != 0;
          row <= row - 1;
        end
      end
      assign draining = capture || leaves;
      for (j = 0; j < COLS; j = j + 1) begin : result_banks
        assign write[j] = leaves && row < written_rows && j < written_cols;
        bank #(SUM, ADDRESS) b (clk, result_address, stored[j*SUM +: SUM],
                                write[j], written_base + row[ADDRESS-1:0], results[j*SUM +: SUM]);
      end
    end
  endgenerate

  // counters
  integer c;
  reg [31:0] writes;
  always @* begin
    writes = 0;
    for (c = 0; c < COLS; c = c + 1) writes = writes + {31'b0, write[c]};
  end
  always @(posedge clk) begin
    if (begins) begin
      compute_cycles <= 0; busy_cycles <= 0; folds <= 0; left_reads <= 0; top_reads <= 0; result_writes <= 0;
    end else if (busy) begin
      busy_cycles <= busy_cycles + 1;
      if (running) compute_cycles <= compute_cycles + 1;
      if (running && finished) folds <= folds + 1;
      if (feeding) left_reads <= left_reads + {32'b0, live_inner};
      if (top_live) top_reads <= top_reads + {32'b0, live_cols};
      result_writes <= result_writes + {32'b0, writes};
    end
  end
endmodule
