// One operand stays (ws: the second; is: the first, transposed). It is shifted in from above, a row a cycle. Then the other
// operand passes to the right, and partial sums fall down the columns. `valid` and `last` travel with what passes.
module cell_stationary #(parameter WIDTH = 8, parameter SUM = 32) (
  input clk,
  input load, valid, last,
  input signed [WIDTH-1:0] right, above,
  input signed [SUM-1:0] partial,
  output reg valid_out, last_out,
  output reg signed [WIDTH-1:0] right_out, kept,
  output reg signed [SUM-1:0] partial_out
);
  wire signed [2*WIDTH-1:0] product = right * kept;
  always @(posedge clk) begin
    if (load) kept <= above;
    valid_out <= valid;
    last_out <= last;
    right_out <= right;
    partial_out <= partial + {{(SUM-2*WIDTH){product[2*WIDTH-1]}}, product};
  end
endmodule

module array_stationary #(parameter ROWS = 8, parameter COLS = 8, parameter WIDTH = 8, parameter SUM = 32) (
  input clk,
  input load, valid, last,
  input [ROWS*WIDTH-1:0] left,     // one element of each row, of what passes
  input [COLS*WIDTH-1:0] top,      // one element of each column, of what stays
  output finished,                 // the far corner takes the last element of the fold
  output [COLS-1:0] bottom_valid,  // a partial sum falls out of this column
  output [COLS*SUM-1:0] bottom
);
  wire [ROWS*(WIDTH+2)-1:0] lanes, skewed;
  wire [1:0] flags [0:ROWS-1][0:COLS];
  wire signed [WIDTH-1:0] right [0:ROWS-1][0:COLS];
  wire signed [WIDTH-1:0] kept [0:ROWS][0:COLS-1];
  wire signed [SUM-1:0] partial [0:ROWS][0:COLS-1];
  skew #(ROWS, WIDTH+2) left_edge (clk, lanes, skewed);
  genvar i, j;
  generate
    for (i = 0; i < ROWS; i = i + 1) begin : rows
      assign lanes[i*(WIDTH+2) +: WIDTH+2] = {valid, last, left[i*WIDTH +: WIDTH]};
      assign {flags[i][0], right[i][0]} = skewed[i*(WIDTH+2) +: WIDTH+2];
      for (j = 0; j < COLS; j = j + 1) begin : cols
        cell_stationary #(WIDTH, SUM) c (
          .clk(clk), .load(load), .valid(flags[i][j][1]), .last(flags[i][j][0]),
          .right(right[i][j]), .above(kept[i][j]), .partial(partial[i][j]),
          .valid_out(flags[i][j+1][1]), .last_out(flags[i][j+1][0]),
          .right_out(right[i][j+1]), .kept(kept[i+1][j]), .partial_out(partial[i+1][j]));
      end
    end
    for (j = 0; j < COLS; j = j + 1) begin : edges
      assign kept[0][j] = top[j*WIDTH +: WIDTH];
      assign partial[0][j] = {SUM{1'b0}};
      assign bottom[j*SUM +: SUM] = partial[ROWS][j];
      assign bottom_valid[j] = flags[ROWS-1][j+1][1];
    end
  endgenerate
  assign finished = flags[ROWS-1][COLS-1][0];
endmodule
