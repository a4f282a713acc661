// Banks that a bus of several words fills, or empties, in one cycle. A bank is cut into BUS parts (bank.v), which numbers
// take by turns. What a bus brings to a bank in one cycle, or takes of it, are numbers that follow each other, so no part
// has two of them. BUS is a power of two. A bank holds DEPTH numbers.
module operand_bank #(parameter WIDTH = 8, parameter ADDRESS = 16, parameter DEPTH = 1 << ADDRESS, parameter BUS = 1) (
  input clk,
  input [ADDRESS-1:0] read_address,
  output signed [WIDTH-1:0] read_data,
  input [BUS-1:0] fill,
  input [BUS*ADDRESS-1:0] fill_address,
  input [BUS*WIDTH-1:0] fill_data
);
  localparam TURN = $clog2(BUS);
  localparam PART = (DEPTH + BUS - 1) / BUS;
  wire [BUS*WIDTH-1:0] data;
  reg [ADDRESS-1:0] was_read;
  always @(posedge clk) was_read <= read_address;
  assign read_data = data[(was_read & (BUS-1))*WIDTH +: WIDTH];
  genvar p;
  generate
    for (p = 0; p < BUS; p = p + 1) begin : parts
      reg write;
      reg [ADDRESS-1:0] write_address;
      reg [WIDTH-1:0] write_data;
      integer w;
      always @* begin
        write = 0; write_address = 0; write_data = 0;
        for (w = 0; w < BUS; w = w + 1) if (fill[w] && (fill_address[w*ADDRESS +: ADDRESS] & (BUS-1)) == p) begin
          write = 1;
          write_address = write_address | fill_address[w*ADDRESS +: ADDRESS];
          write_data = write_data | fill_data[w*WIDTH +: WIDTH];
        end
      end
      bank #(WIDTH, ADDRESS-TURN, PART) part (clk, read_address[ADDRESS-1:TURN], data[p*WIDTH +: WIDTH],
                                        write, write_address[ADDRESS-1:TURN], write_data);
    end
  endgenerate
endmodule

// One half of a bank of results: the array writes it, or the DMA fills it, never both. Where the array ADDS to sums, it may
// read one tile of a half while the DMA empties another: so each part is there twice, and both copies are written.
module result_bank #(
  parameter SUM = 32, parameter ADDRESS = 16, parameter DEPTH = 1 << ADDRESS, parameter BUS = 1, parameter ADDS = 0
) (
  input clk,
  input [ADDRESS-1:0] read_address,
  output signed [SUM-1:0] read_data,        // 0 without ADDS
  input write,
  input [ADDRESS-1:0] write_address,
  input signed [SUM-1:0] write_data,
  input [BUS-1:0] fill,
  input [BUS*ADDRESS-1:0] fill_address,
  input [BUS*SUM-1:0] fill_data,
  input [BUS-1:0] empty,                    // words that the DMA reads: they are in `leaving` in the next cycle
  input [BUS*ADDRESS-1:0] empty_address,
  output [BUS*SUM-1:0] leaving              // of each part the number that was read
);
  localparam TURN = $clog2(BUS);
  localparam PART = (DEPTH + BUS - 1) / BUS;
  wire [BUS*SUM-1:0] so_far;
  reg [ADDRESS-1:0] was_read;
  always @(posedge clk) was_read <= read_address;
  assign read_data = so_far[(was_read & (BUS-1))*SUM +: SUM];
  genvar p;
  generate
    for (p = 0; p < BUS; p = p + 1) begin : parts
      reg writes;
      reg [ADDRESS-1:0] empties_at, writes_at;
      reg [SUM-1:0] written;
      integer w;
      always @* begin
        writes = write && (write_address & (BUS-1)) == p;
        writes_at = write ? write_address : 0;
        written = write ? write_data : 0;
        empties_at = 0;
        for (w = 0; w < BUS; w = w + 1) begin
          if (fill[w] && (fill_address[w*ADDRESS +: ADDRESS] & (BUS-1)) == p) begin
            writes = 1;
            writes_at = writes_at | fill_address[w*ADDRESS +: ADDRESS];
            written = written | fill_data[w*SUM +: SUM];
          end
          if (empty[w] && (empty_address[w*ADDRESS +: ADDRESS] & (BUS-1)) == p)
            empties_at = empties_at | empty_address[w*ADDRESS +: ADDRESS];
        end
      end
      bank #(SUM, ADDRESS-TURN, PART) of_dma (clk, empties_at[ADDRESS-1:TURN], leaving[p*SUM +: SUM],
                                        writes, writes_at[ADDRESS-1:TURN], written);
      if (ADDS) begin : copy
        bank #(SUM, ADDRESS-TURN, PART) of_array (clk, read_address[ADDRESS-1:TURN], so_far[p*SUM +: SUM],
                                            writes, writes_at[ADDRESS-1:TURN], written);
      end else begin : alone
        assign so_far[p*SUM +: SUM] = {SUM{1'b0}};
      end
    end
  endgenerate
endmodule
