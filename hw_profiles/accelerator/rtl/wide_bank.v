// Banks that a bus of several words fills, or empties, in one cycle. `fill` and `empty` are the DMA's.
//
// Here a memory has a port for each word of the bus. In a chip it is cut into as many, which numbers take by turns.
module operand_bank #(parameter WIDTH = 8, parameter ADDRESS = 16, parameter BUS = 1) (
  input clk,
  input [ADDRESS-1:0] read_address,
  output reg signed [WIDTH-1:0] read_data,
  input [BUS-1:0] fill,
  input [BUS*ADDRESS-1:0] fill_address,
  input [BUS*WIDTH-1:0] fill_data
);
  reg signed [WIDTH-1:0] memory [0:(1<<ADDRESS)-1];
  integer w;
  always @(posedge clk) begin
    read_data <= memory[read_address];
    for (w = 0; w < BUS; w = w + 1) if (fill[w]) memory[fill_address[w*ADDRESS +: ADDRESS]] <= fill_data[w*WIDTH +: WIDTH];
  end
endmodule

// One half of a bank of results: the array adds to it, or the DMA fills and empties it, never both.
module result_bank #(parameter SUM = 32, parameter ADDRESS = 16, parameter BUS = 1) (
  input clk,
  input [ADDRESS-1:0] read_address,
  output reg signed [SUM-1:0] read_data,
  input write,
  input [ADDRESS-1:0] write_address,
  input signed [SUM-1:0] write_data,
  input [BUS-1:0] fill,
  input [BUS*ADDRESS-1:0] dma_address,
  input [BUS*SUM-1:0] fill_data,
  output reg [BUS*SUM-1:0] empty_data      // in the cycle of the address
);
  reg signed [SUM-1:0] memory [0:(1<<ADDRESS)-1];
  integer w;
  always @* for (w = 0; w < BUS; w = w + 1) empty_data[w*SUM +: SUM] = memory[dma_address[w*ADDRESS +: ADDRESS]];
  always @(posedge clk) begin
    read_data <= memory[read_address];
    if (write) memory[write_address] <= write_data;
    for (w = 0; w < BUS; w = w + 1) if (fill[w]) memory[dma_address[w*ADDRESS +: ADDRESS]] <= fill_data[w*SUM +: SUM];
  end
endmodule
