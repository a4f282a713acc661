// Walks through the steps of a product: blocks of kept tiles; in each all streamed tiles; for each the block's kept
// tiles; for each the chunks of what streams by. A step's position is on the outputs until `advance`.
//
// Two walkers do not stop everywhere. A load need not be made where it is still on the chip: `skip_kept` goes past
// kept tiles after the first streamed one, `skip_chunks_later` past chunks after the first block. Results leave at the
// end of a fold (`skip_chunks`), or of the last streamed tile (`only_last`). `step` counts those passed by as well.
module walker (
  input clk, restart, advance,
  input [31:0] kept_tiles, streamed_tiles, block, chunks,
  input skip_kept, skip_chunks, skip_chunks_later, only_last,
  output reg valid,
  output reg [31:0] step, base, kept, streamed, part,      // numbers of tiles and of the chunk
  output reg [31:0] fold_before, group_before, block_before, // first step of the fold, streamed tile, block before
  output reg fold_odd, group_odd, block_odd
);
  reg [31:0] fold_first, group_first, block_first;
  wire [31:0] left_over = kept_tiles - base;
  wire [31:0] tiles = block < left_over ? block : left_over;
  wire [31:0] next_base = base + tiles;
  wire [31:0] next_left_over = kept_tiles - next_base;
  wire [31:0] next_tiles = block < next_left_over ? block : next_left_over;
  wire whole = skip_chunks || (skip_chunks_later && base != 0);
  wire [31:0] last_streamed = only_last ? streamed_tiles - 1 : 0;
  wire more_parts = !whole && part + 1 < chunks;
  wire more_kept = !(skip_kept && streamed != 0) && kept + 1 < next_base;
  wire more_streamed = !only_last && streamed + 1 < streamed_tiles;
  wire [31:0] next_group = group_first + tiles * chunks;
  wire [31:0] next_block = block_first + tiles * streamed_tiles * chunks;
  wire [31:0] next_fold = fold_first + chunks;
  wire [31:0] first_of_block = next_block + last_streamed * next_tiles * chunks;

  always @(posedge clk) begin
    if (restart) begin
      valid <= 1;
      base <= 0; kept <= 0; part <= 0;
      streamed <= last_streamed;
      step <= last_streamed * (block < kept_tiles ? block : kept_tiles) * chunks;
      fold_first <= 0; group_first <= 0; block_first <= 0;
      fold_before <= 0; group_before <= 0; block_before <= 0;
      fold_odd <= 0; group_odd <= 0; block_odd <= 0;
    end else if (advance && valid) begin
      if (more_parts) begin
        part <= part + 1;
        step <= step + 1;
      end else begin
        part <= 0;
        fold_before <= fold_first;
        fold_odd <= !fold_odd;
        if (more_kept) begin
          kept <= kept + 1;
          step <= only_last ? step + chunks : next_fold;
          fold_first <= next_fold;
        end else begin
          group_before <= group_first;
          group_odd <= !group_odd;
          if (more_streamed) begin
            streamed <= streamed + 1;
            kept <= base;
            step <= next_group;
            fold_first <= next_group;
            group_first <= next_group;
          end else begin
            valid <= next_base < kept_tiles;
            base <= next_base; kept <= next_base;
            streamed <= last_streamed;
            step <= first_of_block;
            fold_first <= next_block;
            group_first <= next_block;
            block_first <= next_block;
            block_before <= block_first;
            block_odd <= !block_odd;
          end
        end
      end
    end
  end
endmodule
