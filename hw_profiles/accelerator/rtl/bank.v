// One bank of an on-chip buffer: a synchronous read port and a write port, as block RAM has them.
module bank #(parameter WIDTH = 8, parameter ADDRESS = 16, parameter DEPTH = 1 << ADDRESS) (
  input clk,
  input [ADDRESS-1:0] read_address,
  output reg signed [WIDTH-1:0] read_data,
  input write,
  input [ADDRESS-1:0] write_address,
  input signed [WIDTH-1:0] write_data
);
  reg signed [WIDTH-1:0] memory [0:DEPTH-1];
  always @(posedge clk) begin
    read_data <= memory[read_address];
    if (write) memory[write_address] <= write_data;
  end
endmodule
