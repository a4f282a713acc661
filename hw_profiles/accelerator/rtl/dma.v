// Moves one tile at a time: `lanes` banks of `depth` numbers each, lane after lane. Of each number `cost` is paid; each
// cycle brings `rate`. So a transfer of w numbers takes ceil(w * cost / rate) cycles; what is left of the last is lost.
module dma #(parameter ADDRESS = 16, parameter BUS = 1) (
  input clk, reset,
  input take,                                   // begin the transfer on the inputs in the next cycle
  input [31:0] lanes, depth, cost, rate,
  input [31:0] from, lane_stride, depth_stride, // in DRAM
  input [ADDRESS-1:0] to,                       // in each bank
  output reg active,
  output last,                                  // this cycle ends the transfer, or nothing is moved
  output reg [BUS-1:0] moves,                   // which words of the bus are used in this cycle
  output reg [BUS*32-1:0] lane, address,
  output reg [BUS*ADDRESS-1:0] bank_address,
  output reg [31:0] moved,
  output reg [BUS*32-1:0] ahead_lane,           // what the next cycle's words are, as far as they are moved
  output reg [BUS*ADDRESS-1:0] ahead_bank_address
);
  reg [31:0] remaining, credit, row, at, price, size, strides_lane, strides_depth, row_address, begin_address;
  reg [ADDRESS-1:0] bank_from;
  reg [31:0] next_row, next_at, next_row_address, next_address, now_address, paid;
  integer w;
  always @* begin
    next_row = row;
    next_at = at;
    next_row_address = row_address;
    now_address = begin_address;
    paid = credit + rate;
    moved = 0;
    for (w = 0; w < BUS; w = w + 1) begin
      moves[w] = active && paid >= price && w < remaining;
      lane[w*32 +: 32] = next_row;
      address[w*32 +: 32] = now_address;
      bank_address[w*ADDRESS +: ADDRESS] = bank_from + next_at[ADDRESS-1:0];
      if (moves[w]) begin
        paid = paid - price;
        moved = moved + 1;
        if (next_at + 1 == size) begin
          next_at = 0;
          next_row = next_row + 1;
          next_row_address = next_row_address + strides_lane;
          now_address = next_row_address;
        end else begin
          next_at = next_at + 1;
          now_address = now_address + strides_depth;
        end
      end
    end
    next_address = now_address;
  end
  assign last = !active || moved == remaining;

  // banks are read a cycle ahead
  reg [31:0] ahead_row, ahead_at, ahead_size;
  reg [ADDRESS-1:0] ahead_from;
  integer a;
  always @* begin
    ahead_row = take ? 0 : next_row;
    ahead_at = take ? 0 : next_at;
    ahead_size = take ? depth : size;
    ahead_from = take ? to : bank_from;
    for (a = 0; a < BUS; a = a + 1) begin
      ahead_lane[a*32 +: 32] = ahead_row;
      ahead_bank_address[a*ADDRESS +: ADDRESS] = ahead_from + ahead_at[ADDRESS-1:0];
      if (ahead_at + 1 == ahead_size) begin
        ahead_at = 0;
        ahead_row = ahead_row + 1;
      end else ahead_at = ahead_at + 1;
    end
  end
  always @(posedge clk) begin
    if (reset) active <= 0;
    else if (take) begin
      active <= 1;
      remaining <= lanes * depth;
      credit <= 0; row <= 0; at <= 0;
      price <= cost; size <= depth;
      strides_lane <= lane_stride; strides_depth <= depth_stride;
      row_address <= from; begin_address <= from;
      bank_from <= to;
    end else begin
      if (last) active <= 0;
      remaining <= remaining - moved;
      credit <= paid; row <= next_row; at <= next_at;
      row_address <= next_row_address; begin_address <= next_address;
    end
  end
endmodule
