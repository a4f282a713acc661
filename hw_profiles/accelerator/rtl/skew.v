// The skew at an edge: lane i is delayed by i cycles, so that operands meet in the cells.
module skew #(parameter LANES = 8, parameter WIDTH = 8) (
  input clk,
  input [LANES*WIDTH-1:0] in,
  output [LANES*WIDTH-1:0] out
);
  genvar i, d;
  generate
    for (i = 0; i < LANES; i = i + 1) begin : lane
      wire [WIDTH-1:0] stage [0:i];
      assign stage[0] = in[i*WIDTH +: WIDTH];
      for (d = 0; d < i; d = d + 1) begin : delay
        reg [WIDTH-1:0] held;
        always @(posedge clk) held <= stage[d];
        assign stage[d+1] = held;
      end
      assign out[i*WIDTH +: WIDTH] = stage[i];
    end
  endgenerate
endmodule
