// Outputs stay. Both operands pass: the first to the right, the second down. A cell multiplies what passes and keeps the
// sum. `first` and `last` travel with the first operand. After a fold the sums are captured in a second register and
// leave downwards, the last row first, while the next fold is computed.
module cell_os #(parameter WIDTH = 8, parameter SUM = 32) (
  input clk,
  input first, last, capture, drain,
  input signed [WIDTH-1:0] right, down,
  input signed [SUM-1:0] above,
  output reg first_out, last_out,
  output reg signed [WIDTH-1:0] right_out, down_out,
  output reg signed [SUM-1:0] leaving
);
  wire signed [2*WIDTH-1:0] product = right * down;
  reg signed [SUM-1:0] sum;
  always @(posedge clk) begin
    first_out <= first;
    last_out <= last;
    right_out <= right;
    down_out <= down;
    sum <= (first ? {SUM{1'b0}} : sum) + {{(SUM-2*WIDTH){product[2*WIDTH-1]}}, product};
    if (capture) leaving <= sum;
    else if (drain) leaving <= above;
  end
endmodule

module array_os #(parameter ROWS = 8, parameter COLS = 8, parameter WIDTH = 8, parameter SUM = 32) (
  input clk,
  input first, last, capture, drain,
  input [ROWS*WIDTH-1:0] left,   // one element of each row
  input [COLS*WIDTH-1:0] top,    // one element of each column
  output finished,               // the far corner takes the last pair of the fold
  output [COLS*SUM-1:0] bottom   // the row that leaves
);
  wire [ROWS*(WIDTH+2)-1:0] lanes, skewed;
  wire [COLS*WIDTH-1:0] skewed_top;
  wire [1:0] flags [0:ROWS-1][0:COLS];
  wire signed [WIDTH-1:0] right [0:ROWS-1][0:COLS];
  wire signed [WIDTH-1:0] down [0:ROWS][0:COLS-1];
  wire signed [SUM-1:0] leaving [0:ROWS][0:COLS-1];
  skew #(ROWS, WIDTH+2) left_edge (clk, lanes, skewed);
  skew #(COLS, WIDTH) top_edge (clk, top, skewed_top);
  genvar i, j;
  generate
    for (i = 0; i < ROWS; i = i + 1) begin : rows
      assign lanes[i*(WIDTH+2) +: WIDTH+2] = {first, last, left[i*WIDTH +: WIDTH]};
      assign {flags[i][0], right[i][0]} = skewed[i*(WIDTH+2) +: WIDTH+2];
      for (j = 0; j < COLS; j = j + 1) begin : cols
        cell_os #(WIDTH, SUM) c (
          .clk(clk), .first(flags[i][j][1]), .last(flags[i][j][0]), .capture(capture), .drain(drain),
          .right(right[i][j]), .down(down[i][j]), .above(leaving[i][j]),
          .first_out(flags[i][j+1][1]), .last_out(flags[i][j+1][0]),
          .right_out(right[i][j+1]), .down_out(down[i+1][j]), .leaving(leaving[i+1][j]));
      end
    end
    for (j = 0; j < COLS; j = j + 1) begin : edges
      assign down[0][j] = skewed_top[j*WIDTH +: WIDTH];
      assign leaving[0][j] = {SUM{1'b0}};
      assign bottom[j*SUM +: SUM] = leaving[ROWS][j];
    end
  endgenerate
  assign finished = flags[ROWS-1][COLS-1][0];
endmodule
