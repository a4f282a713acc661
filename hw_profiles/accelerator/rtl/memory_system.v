// An array behind a DMA: buffers of two halves, of which the array reads one while the DMA fills the other.
//
// A product is computed in steps (walker.v): a fold, or a part of one where what streams by is longer than half a
// buffer. A step begins when its operands are there and the half of its results is free. The DMA moves one tile at a
// time (dma.v), in a fixed order: operands as steps need them; those that may come when step t has ended go before the
// results of step t; partial sums for step t+2 follow these. Which tiles are kept, how many and how long a chunk is,
// is the schedule, an input. When anything begins or ends is not: a fold ends when its last operand reaches the far
// corner, a transfer when its last number has moved, and results are whole when the last one is in its bank.
//
// Left lanes are rows m (os) or k (ws), top lanes columns n. `is` is ws of the transposed product.
module memory_system #(
  parameter ROWS = 8, parameter COLS = 8, parameter WIDTH = 8, parameter SUM = 32,
  parameter STATIONARY = 0, parameter ADDRESS = 16, parameter BUS = 1,    // words, a power of two
  parameter LEFT_HALF = 1 << (ADDRESS-1), parameter TOP_HALF = 1 << (ADDRESS-1), // numbers in half a bank
  parameter RESULTS_HALF = 1 << (ADDRESS-1)
) (
  input clk, reset, start,
  input [31:0] m, n, k,
  // the schedule
  input [31:0] kept_tiles, streamed_tiles, block, chunk, chunks,
  input keeps_left,                       // os: left tiles are kept, not top ones; ws: all of the left operand stays
  input reloads,                          // os: no tile of either is kept
  input spills,                           // ws: results leave after each step
  input [31:0] left_half, top_half,       // where the second half of a bank begins: at most LEFT_HALF, TOP_HALF
  // the DMA: rate / per words a cycle; of a finished result so many words leave, 1 is its sum >> shift, saturated
  input [31:0] rate, per, result_words, shift,
  input [31:0] left_m, left_k, top_n, top_k, result_m, result_n, // strides in DRAM
  // DRAM, which answers in the same cycle
  output reg [1:0] space,                 // 0 left, 1 top, 2 results
  output [BUS*32-1:0] address,
  output [BUS-1:0] write,
  output reg [BUS*SUM-1:0] write_data,
  input [BUS*SUM-1:0] read_data,
  output busy,
  // what was counted
  output reg [63:0] total_cycles, compute_cycles, stall_cycles, folds,
  output reg [63:0] left_reads, top_reads, result_writes,             // on-chip, numbers
  output reg [63:0] left_words, top_words, result_words_out, partial_words // by the DMA
);
  localparam WORDS = SUM / WIDTH;
  localparam LEFT = 0, TOP = 1, PARTIAL = 2, STORE = 3;
  wire [31:0] stream = STATIONARY ? m : k;
  wire chunked = chunks > 1;
  reg [1:0] ahead;                        // two cycles in which the walker of partial sums goes ahead

  // ---- the walkers: what is computed next, loaded next, stored next, and the step two after that ----
  wire go, store_taken, partial_advance;
  wire c_valid, c_fold, c_group, c_block;
  wire [31:0] c_step, c_base, c_kept, c_streamed, c_part;
  walker computed (clk, start, go, kept_tiles, streamed_tiles, block, chunks, 1'b0, 1'b0, 1'b0, 1'b0,
                   c_valid, c_step, c_base, c_kept, c_streamed, c_part, , , , c_fold, c_group, c_block);
  wire l_valid, l_fold, l_group, l_block, load_advance;
  wire [31:0] l_step, l_base, l_kept, l_streamed, l_part, l_fold_before, l_group_before, l_block_before;
  walker loaded (clk, start, load_advance, kept_tiles, streamed_tiles, block, chunks,
                 STATIONARY == 0 && !reloads, 1'b0, STATIONARY != 0 && keeps_left, 1'b0,
                 l_valid, l_step, l_base, l_kept, l_streamed, l_part,
                 l_fold_before, l_group_before, l_block_before, l_fold, l_group, l_block);
  wire s_valid, s_fold, s_block;
  wire [31:0] s_step_first, s_base, s_kept, s_streamed, s_part;
  walker stored (clk, start, store_taken, kept_tiles, streamed_tiles, block, chunks,
                 1'b0, !spills, 1'b0, STATIONARY != 0 && !spills,
                 s_valid, s_step_first, s_base, s_kept, s_streamed, s_part, , , , s_fold, , s_block);
  wire [31:0] s_step = spills ? s_step_first : s_step_first + chunks - 1;
  wire p_valid;
  wire [31:0] p_step, p_base, p_kept, p_streamed, p_part;
  walker returned (clk, start, partial_advance, kept_tiles, streamed_tiles, block, chunks, 1'b0, 1'b0, 1'b0, 1'b0,
                   p_valid, p_step, p_base, p_kept, p_streamed, p_part, , , , , , );

  // ---- a step's place, of the step computed next ----
  wire [31:0] c_down = STATIONARY ? c_streamed : keeps_left ? c_kept : c_streamed;  // number of the left tile
  wire [31:0] c_across = STATIONARY ? c_kept : keeps_left ? c_streamed : c_kept;    // and of the top one
  wire [31:0] c_length = stream - c_part * chunk < chunk ? stream - c_part * chunk : chunk;
  wire [31:0] c_inner = (STATIONARY ? k : m) - c_down * ROWS;
  wire [31:0] c_width = n - c_across * COLS;
  wire [31:0] c_slot = (c_kept - c_base) * stream;
  wire c_kept_odd = reloads ? c_step[0] : c_block;
  wire c_streamed_odd = chunked ? c_step[0] : c_group;
  wire [31:0] c_kept_at = reloads ? 0 : c_slot + c_part * chunk;
  wire [31:0] c_left_at = STATIONARY
    ? (keeps_left ? c_streamed * stream + c_part * chunk : c_streamed_odd ? left_half : 0)
    : keeps_left ? (c_kept_odd ? left_half : 0) + c_kept_at : c_streamed_odd ? left_half : 0;
  wire [31:0] c_top_at = STATIONARY ? (c_fold ? top_half : 0)
    : keeps_left ? (c_streamed_odd ? top_half : 0) : (c_kept_odd ? top_half : 0) + c_kept_at;
  wire c_half = STATIONARY ? (spills ? c_step[0] : c_block) : c_fold;   // of the results
  // what it waits for: loads, stores that free its half, partial sums
  wire c_first_load = STATIONARY ? c_part == 0 : c_streamed == 0 || reloads;
  wire c_second_load = STATIONARY && keeps_left ? c_base == 0 : c_kept == c_base;
  reg [31:0] needed_before, loads_done, stores_done, partials_done, partials_before, fold_count;
  reg [31:0] stores_so_far, stores_before_block, free_after_block;
  wire [31:0] needed = needed_before + {31'b0, c_first_load} + {31'b0, c_second_load};
  wire c_last_part = c_part + 1 == chunks;
  wire c_new_block = c_streamed == 0 && c_kept == c_base && c_part == 0;
  wire [31:0] free_after = !STATIONARY ? (fold_count == 0 ? 0 : fold_count - 1)
    : spills ? (c_step == 0 ? 0 : c_step - 1) : c_new_block ? stores_before_block : free_after_block;
  wire c_partial = spills && c_streamed != 0;
  wire there = c_valid && loads_done >= needed && stores_done >= free_after
    && (!c_partial || partials_done > partials_before);

  // ---- the step that is computed ----
  reg running, first_part, last_part, half, adds_now;
  reg [31:0] at_cycle, length, live_rows, live_cols, left_at, top_at, slot;
  wire finished;
  wire [31:0] preload = STATIONARY && first_part ? ROWS : 0;
  wire loading = running && at_cycle < preload;
  wire [31:0] at = at_cycle - preload;
  wire feeding = running && !loading && at < length;
  wire ending = running && (last_part ? finished : feeding && at + 1 == length);
  assign go = (ending || !running) && there && !reset && !start;
  wire begins_fold = go && c_part == 0;

  // banks are read a cycle ahead
  wire [31:0] next_cycle = go ? 0 : at_cycle + 1;
  wire [31:0] next_preload = go ? (STATIONARY && c_part == 0 ? ROWS : 0) : preload;
  wire [31:0] next_at = next_cycle - next_preload;
  wire [31:0] left_address = (go ? c_left_at : left_at) + next_at;
  wire [31:0] top_address = (go ? c_top_at : top_at) + (STATIONARY ? ROWS - 1 - next_cycle : next_at);
  wire [31:0] loaded_row = ROWS - 1 - at_cycle;            // the last row is shifted in first
  wire top_live = STATIONARY ? loading && loaded_row < live_rows : feeding;
  always @(posedge clk) begin
    if (reset || start) running <= 0;
    else running <= go || (running && !ending);
    at_cycle <= next_cycle;
    if (go) begin
      first_part <= c_part == 0; last_part <= c_last_part;
      length <= c_length;
      live_rows <= c_inner < ROWS ? c_inner : ROWS;
      live_cols <= c_width < COLS ? c_width : COLS;
      left_at <= c_left_at; top_at <= c_top_at;
      slot <= STATIONARY && !spills ? c_slot : 0;
      half <= c_half;
      adds_now <= c_streamed != 0;
    end
    if (start) begin
      needed_before <= 0; partials_before <= 0; fold_count <= 0;
      stores_so_far <= 0; stores_before_block <= 0; free_after_block <= 0;
    end else if (go) begin
      needed_before <= needed;
      partials_before <= partials_before + {31'b0, c_partial};
      if (c_last_part) fold_count <= fold_count + 1;
      if (c_new_block) begin
        free_after_block <= stores_before_block;
        stores_before_block <= stores_so_far;
      end
      if (c_last_part && c_streamed + 1 == streamed_tiles) stores_so_far <= stores_so_far + 1;
    end
  end

  // ---- the DMA ----
  wire moving, transfer_last;
  wire [BUS-1:0] moves;
  wire [BUS*32-1:0] lane;
  wire [BUS*ADDRESS-1:0] bank_address;
  wire [31:0] moved;
  wire [BUS*32-1:0] ahead_lane;
  wire [BUS*ADDRESS-1:0] ahead_bank_address;
  reg [1:0] kind;
  reg dma_half, whole;
  reg second;                               // of this step's two operands
  reg partial_pending;
  reg [31:0] steps_done;
  wire results_whole;
  // the operand that is loaded next
  wire l_first = STATIONARY ? l_part == 0 : l_streamed == 0 || reloads;
  wire l_second = STATIONARY && keeps_left ? l_base == 0 : l_kept == l_base;
  wire is_second = second || !l_first;
  wire l_left = STATIONARY ? is_second : is_second != keeps_left;
  wire [31:0] l_before = l_step == 0 ? 0 : l_step - 1;
  wire [31:0] load_after = !is_second
    ? (STATIONARY ? l_fold_before : reloads ? l_before : l_block_before)
    : STATIONARY && keeps_left ? 0 : chunked ? l_before : l_group_before;
  wire [31:0] l_down = STATIONARY ? l_streamed : keeps_left ? l_kept : l_streamed;
  wire [31:0] l_across = STATIONARY ? l_kept : keeps_left ? l_streamed : l_kept;
  wire [31:0] l_inner = (STATIONARY ? k : m) - l_down * ROWS;
  wire [31:0] l_width = n - l_across * COLS;
  wire [31:0] l_rows = l_inner < ROWS ? l_inner : ROWS;
  wire [31:0] l_cols = l_width < COLS ? l_width : COLS;
  wire [31:0] l_at = l_part * chunk;
  wire [31:0] l_length = stream - l_at < chunk ? stream - l_at : chunk;
  wire l_kept_odd = reloads ? l_step[0] : l_block;
  wire l_streamed_odd = chunked ? l_step[0] : l_group;
  wire [31:0] l_kept_at = reloads ? 0 : (l_kept - l_base) * stream + l_at;
  wire [31:0] l_to = STATIONARY
    ? (l_left ? (keeps_left ? l_streamed * stream + l_at : l_streamed_odd ? left_half : 0) : l_fold ? top_half : 0)
    : is_second ? (l_streamed_odd ? (l_left ? left_half : top_half) : 0)
                : (l_kept_odd ? (l_left ? left_half : top_half) : 0) + l_kept_at;
  wire [31:0] l_from = l_left
    ? (STATIONARY ? l_down * ROWS * left_k + l_at * left_m : l_down * ROWS * left_m + l_at * left_k)
    : (STATIONARY ? l_across * COLS * top_n + l_down * ROWS * top_k : l_across * COLS * top_n + l_at * top_k);
  wire [31:0] l_depth = STATIONARY && !l_left ? l_rows : l_length;
  // results that leave next, and partial sums that come back
  wire [31:0] s_down = STATIONARY ? 0 : keeps_left ? s_kept : s_streamed;
  wire [31:0] s_across = STATIONARY ? s_kept : keeps_left ? s_streamed : s_kept;
  wire [31:0] s_width = n - s_across * COLS;
  wire [31:0] s_first_row = STATIONARY ? (spills ? s_part * chunk : 0) : s_down * ROWS;
  wire [31:0] s_most = STATIONARY ? (spills ? chunk : m) : ROWS;
  wire [31:0] s_rows = m - s_first_row < s_most ? m - s_first_row : s_most;
  wire [31:0] s_cols = s_width < COLS ? s_width : COLS;
  wire [31:0] s_slot = STATIONARY && !spills ? (s_kept - s_base) * stream : 0;
  wire s_half = STATIONARY ? (spills ? s_step[0] : s_block) : s_fold;
  wire s_whole = !spills || s_streamed + 1 == streamed_tiles;
  wire [31:0] p_width = n - p_kept * COLS;
  wire [31:0] p_first_row = p_part * chunk;
  wire [31:0] p_rows = m - p_first_row < chunk ? m - p_first_row : chunk;

  wire [1:0] next_kind = partial_pending ? PARTIAL
    : l_valid && (!s_valid || load_after <= s_step + 1) ? (l_left ? LEFT : TOP) : STORE;
  wire ready = next_kind == PARTIAL || (next_kind == STORE ? s_valid && results_whole : steps_done >= load_after);
  wire take = transfer_last && busy && ready && !start;
  wire takes_load = take && (next_kind == LEFT || next_kind == TOP);
  assign load_advance = takes_load && (is_second || !l_second);
  assign store_taken = take && next_kind == STORE;
  wire returns = spills && p_valid && p_streamed != 0;
  assign partial_advance = (ahead != 0) || (take && next_kind == PARTIAL) || (store_taken && !returns);
  wire [31:0] across = next_kind == PARTIAL ? p_kept : s_across;
  wire [31:0] first_row = next_kind == PARTIAL ? p_first_row : s_first_row;
  wire is_load = next_kind == LEFT || next_kind == TOP;
  dma #(ADDRESS, BUS) mover (
    .clk(clk), .reset(reset || start), .take(take), .rate(rate),
    .lanes(is_load ? (l_left ? l_rows : l_cols)
           : next_kind == PARTIAL ? (p_width < COLS ? p_width : COLS) : s_cols),
    .depth(is_load ? l_depth : next_kind == PARTIAL ? p_rows : s_rows),
    .cost(is_load ? per : next_kind == STORE && s_whole ? per * result_words : per * WORDS),
    .from(is_load ? l_from : across * COLS * result_n + first_row * result_m),
    .lane_stride(is_load ? (l_left ? (STATIONARY ? left_k : left_m) : top_n) : result_n),
    .depth_stride(is_load ? (l_left ? (STATIONARY ? left_m : left_k) : top_k) : result_m),
    .to(is_load ? l_to[ADDRESS-1:0] : next_kind == PARTIAL ? {ADDRESS{1'b0}} : s_slot[ADDRESS-1:0]),
    .active(moving), .last(transfer_last), .moves(moves), .lane(lane), .address(address),
    .bank_address(bank_address), .moved(moved), .ahead_lane(ahead_lane), .ahead_bank_address(ahead_bank_address));
  wire transfer_ends = moving && transfer_last;
  always @(posedge clk) begin
    if (start) begin
      ahead <= spills ? 2 : 0;
      second <= 0; partial_pending <= 0; steps_done <= 0;
      loads_done <= 0; stores_done <= 0; partials_done <= 0;
    end else begin
      if (ahead != 0) ahead <= ahead - 1;
      if (take) begin
        kind <= next_kind;
        dma_half <= next_kind == PARTIAL ? p_step[0] : s_half;
        whole <= s_whole;
        space <= next_kind == LEFT ? 0 : next_kind == TOP ? 1 : 2;
        if (takes_load) second <= !load_advance;
        if (next_kind == PARTIAL) partial_pending <= 0;
        if (store_taken) partial_pending <= returns;
      end
      if (ending) steps_done <= steps_done + 1;
      if (transfer_ends) begin
        if (kind == STORE) stores_done <= stores_done + 1;
        else if (kind == PARTIAL) partials_done <= partials_done + 1;
        else loads_done <= loads_done + 1;
      end
    end
  end

  // ---- buffers and array ----
  wire [ROWS*WIDTH-1:0] left;
  wire [COLS*WIDTH-1:0] top;
  reg [BUS*WIDTH-1:0] operands;
  integer w;
  always @* for (w = 0; w < BUS; w = w + 1) operands[w*WIDTH +: WIDTH] = read_data[w*SUM +: WIDTH];
  genvar i, j, b;
  generate
    for (i = 0; i < ROWS; i = i + 1) begin : left_banks
      wire signed [WIDTH-1:0] data;
      wire [BUS-1:0] fill;
      for (b = 0; b < BUS; b = b + 1) begin : word
        assign fill[b] = moves[b] && kind == LEFT && lane[b*32 +: 32] == i;
      end
      operand_bank #(WIDTH, ADDRESS, 2*LEFT_HALF, BUS) halves (
        clk, left_address[ADDRESS-1:0], data, fill, bank_address, operands);
      assign left[i*WIDTH +: WIDTH] = feeding && i < live_rows ? data : {WIDTH{1'b0}};
    end
    for (j = 0; j < COLS; j = j + 1) begin : top_banks
      wire signed [WIDTH-1:0] data;
      wire [BUS-1:0] fill;
      for (b = 0; b < BUS; b = b + 1) begin : word
        assign fill[b] = moves[b] && kind == TOP && lane[b*32 +: 32] == j;
      end
      operand_bank #(WIDTH, ADDRESS, 2*TOP_HALF, BUS) halves (
        clk, top_address[ADDRESS-1:0], data, fill, bank_address, operands);
      assign top[j*WIDTH +: WIDTH] = top_live && j < live_cols ? data : {WIDTH{1'b0}};
    end
  endgenerate

  // results, in two halves
  wire [COLS-1:0] result_write, result_half;
  wire [COLS*SUM-1:0] sums;
  wire [COLS*ADDRESS-1:0] write_at, read_at;
  wire [COLS*SUM-1:0] so_far;
  wire [COLS-1:0] read_half;
  wire [2*COLS*BUS*SUM-1:0] leaving;
  reg [COLS-1:0] so_far_half;
  always @(posedge clk) so_far_half <= read_half;
  generate
    for (j = 0; j < COLS; j = j + 1) begin : result_banks
      wire signed [SUM-1:0] kept_sum [0:1];
      for (i = 0; i < 2; i = i + 1) begin : halves
        wire [BUS-1:0] fill, empty;
        for (b = 0; b < BUS; b = b + 1) begin : word
          assign fill[b] = moves[b] && kind == PARTIAL && dma_half == i && lane[b*32 +: 32] == j;
          assign empty[b] = ahead_lane[b*32 +: 32] == j;
        end
        result_bank #(SUM, ADDRESS, RESULTS_HALF, BUS, STATIONARY) bank (
          clk, read_at[j*ADDRESS +: ADDRESS], kept_sum[i],
          result_write[j] && result_half[j] == i, write_at[j*ADDRESS +: ADDRESS], sums[j*SUM +: SUM],
          fill, bank_address, read_data, empty, ahead_bank_address, leaving[(j*2+i)*BUS*SUM +: BUS*SUM]);
      end
      assign so_far[j*SUM +: SUM] = kept_sum[so_far_half[j]];
    end
  endgenerate

  generate
    if (STATIONARY) begin : stationary
      wire [COLS-1:0] falls;
      wire [COLS*SUM-1:0] bottom;
      reg adds, fold_half;                  // of the fold whose sums fall; its last one falls in the next one's first cycle
      reg [31:0] fold_cols, fold_slot, fallen, fallen_needed;
      array_stationary #(ROWS, COLS, WIDTH, SUM) array (
        clk, loading, feeding, feeding && last_part && at + 1 == length, left, top, finished, falls, bottom);
      always @(posedge clk) if (running && first_part && at_cycle == 0) begin
        adds <= adds_now;
        fold_half <= half;
        fold_cols <= live_cols;
        fold_slot <= slot;
      end
      for (j = 0; j < COLS; j = j + 1) begin : columns
        reg [31:0] row, in_chunk;           // of the sum that falls next
        reg odd;                            // half, where results leave after each step
        wire ends = row + 1 == m;
        wire ends_chunk = ends || in_chunk + 1 == chunk;
        wire [31:0] next_row = !falls[j] ? row : ends ? 0 : row + 1;
        wire [31:0] next_in_chunk = !falls[j] ? in_chunk : ends_chunk ? 0 : in_chunk + 1;
        wire next_odd = odd ^ (falls[j] && ends_chunk);
        always @(posedge clk) begin
          row <= start ? 0 : next_row;
          in_chunk <= start ? 0 : next_in_chunk;
          odd <= start ? 0 : next_odd;
        end
        assign result_half[j] = spills ? odd : fold_half;
        assign read_half[j] = spills ? next_odd : fold_half;
        assign result_write[j] = falls[j] && j < fold_cols;
        assign write_at[j*ADDRESS +: ADDRESS] = spills ? in_chunk : fold_slot + row;
        assign read_at[j*ADDRESS +: ADDRESS] = spills ? next_in_chunk : fold_slot + next_row;
        assign sums[j*SUM +: SUM] = bottom[j*SUM +: SUM] + (adds ? so_far[j*SUM +: SUM] : {SUM{1'b0}});
      end
      // results are whole when the last column has so many of them
      wire [31:0] s_over = kept_tiles - s_base;
      wire [31:0] s_tiles = block < s_over ? block : s_over;
      wire [31:0] fold_number = s_base * streamed_tiles + (streamed_tiles - 1) * s_tiles + (s_kept - s_base);
      always @* fallen_needed = spills
        ? (s_base * streamed_tiles + s_streamed) * m + s_first_row + s_rows : (fold_number + 1) * m;
      always @(posedge clk) fallen <= start ? 0 : fallen + {31'b0, falls[COLS-1]};
      assign results_whole = fallen >= fallen_needed;
    end else begin : outputs
      reg capture, leaves, drain_half, captured_half;
      reg [31:0] row, drain_rows, drain_cols, captured_rows, captured_cols, drained, asked;
      array_os #(ROWS, COLS, WIDTH, SUM) array (
        clk, feeding && first_part && at == 0, feeding && last_part && at + 1 == length, capture, leaves, left, top,
        finished, sums);
      always @(posedge clk) begin
        capture <= finished && running && !reset;
        if (finished) begin
          drain_rows <= live_rows;
          drain_cols <= live_cols;
          drain_half <= half;
        end
        if (reset || start) leaves <= 0;
        else if (capture) begin
          leaves <= 1;
          row <= ROWS - 1;
        end else if (leaves) begin
          leaves <= row != 0;
          row <= row - 1;
        end
        if (start) begin
          drained <= 0; asked <= 0;
        end else begin
          drained <= drained + {31'b0, leaves && row == 0};
          asked <= asked + {31'b0, store_taken};
        end
      end
      assign results_whole = drained > asked;
      for (j = 0; j < COLS; j = j + 1) begin : columns
        assign result_half[j] = drain_half;
        assign read_half[j] = 1'b0;
        assign result_write[j] = leaves && row < drain_rows && j < drain_cols;
        assign write_at[j*ADDRESS +: ADDRESS] = row;
        assign read_at[j*ADDRESS +: ADDRESS] = 0;
      end
    end
  endgenerate

  // what leaves: a sum, or the sum >> shift, saturated
  assign write = kind == STORE ? moves : {BUS{1'b0}};
  reg signed [SUM-1:0] number;
  localparam signed [SUM-1:0] MOST = (1 << (WIDTH - 1)) - 1;
  localparam signed [SUM-1:0] LEAST = -(1 << (WIDTH - 1));
  always @* begin
    number = 0;
    for (w = 0; w < BUS; w = w + 1) begin
      number = leaving[(((lane[w*32 +: 32] % COLS)*2 + {31'b0, dma_half})*BUS
                        + (bank_address[w*ADDRESS +: ADDRESS] & (BUS-1)))*SUM +: SUM];
      if (whole && result_words == 1) begin
        number = number >>> shift;
        number = number > MOST ? MOST : number < LEAST ? LEAST : number;
      end
      write_data[w*SUM +: SUM] = number;
    end
  end

  // ---- busy, and counters ----
  reg at_work;
  assign busy = at_work;
  integer c;
  reg [31:0] writes;
  always @* begin
    writes = 0;
    for (c = 0; c < COLS; c = c + 1) writes = writes + {31'b0, result_write[c]};
  end
  always @(posedge clk) begin
    if (reset) at_work <= 0;
    else if (start) begin
      at_work <= 1;
      total_cycles <= 0; compute_cycles <= 0; stall_cycles <= 0; folds <= 0;
      left_reads <= 0; top_reads <= 0; result_writes <= 0;
      left_words <= 0; top_words <= 0; result_words_out <= 0; partial_words <= 0;
    end else if (at_work) begin
      if (transfer_last && !s_valid && !l_valid && !partial_pending) at_work <= 0;
      total_cycles <= total_cycles + 1;
      if (running) compute_cycles <= compute_cycles + 1;
      else if (c_valid) stall_cycles <= stall_cycles + 1;
      if (ending && last_part) folds <= folds + 1;
      if (feeding) left_reads <= left_reads + {32'b0, live_rows};
      if (top_live) top_reads <= top_reads + {32'b0, live_cols};
      result_writes <= result_writes + {32'b0, writes};
      if (moving && kind == LEFT) left_words <= left_words + {32'b0, moved};
      if (moving && kind == TOP) top_words <= top_words + {32'b0, moved};
      if (moving && kind == STORE && whole) result_words_out <= result_words_out + {32'b0, moved * result_words};
      if (moving && (kind == PARTIAL || (kind == STORE && !whole)))
        partial_words <= partial_words + {32'b0, moved * WORDS};
    end
  end
endmodule
