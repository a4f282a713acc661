// Computes one product behind a DMA and compares it. first.hex (M x K), second.hex (K x N) and expected.hex (M x N) are
// as for testbench.v; +ta=1, +tb=1: the first, the second lies transposed in DRAM (K x M, N x K), as it does in a
// backward product. The schedule and the DMA's rate are plusargs too: `memory_system.Plan` has them.
`include "parameters.vh"
module memory_testbench;
  localparam STATIONARY = `KEPT != 0;
  reg clk = 0, reset = 1, start = 0;
  integer m, n, k, ta, tb, rows, cols, i, j, wrong = 0, waited = 0;
  integer kept_tiles, streamed_tiles, block, chunk, chunks, keeps_left, reloads, spills, left_half, top_half;
  integer rate, per, result_words, shift;
  integer first_m, first_k, second_k, second_n;
  reg turned;                  // is: the transposed product, on the array of ws
  reg [8*256-1:0] dir;
  reg signed [`WIDTH-1:0] first [0:(1<<22)-1];
  reg signed [`WIDTH-1:0] second [0:(1<<22)-1];
  reg signed [`SUM-1:0] expected [0:(1<<22)-1];
  reg signed [`SUM-1:0] results [0:(1<<22)-1];
  reg signed [`SUM-1:0] wanted;

  wire [1:0] space;
  wire [`BUS*32-1:0] address;
  wire [`BUS-1:0] write;
  wire [`BUS*`SUM-1:0] write_data;
  reg [`BUS*`SUM-1:0] read_data;
  wire busy;
  wire [63:0] total_cycles, compute_cycles, stall_cycles, folds, left_reads, top_reads, result_writes;
  wire [63:0] left_words, top_words, result_words_out, partial_words;

  memory_system #(.ROWS(`ROWS), .COLS(`COLS), .WIDTH(`WIDTH), .SUM(`SUM), .STATIONARY(STATIONARY),
                  .ADDRESS(`ADDRESS), .BUS(`BUS),
                  .LEFT_HALF(`LEFT_HALF), .TOP_HALF(`TOP_HALF), .RESULTS_HALF(`RESULTS_HALF)) dut (
    .clk(clk), .reset(reset), .start(start), .m(rows), .n(cols), .k(k),
    .kept_tiles(kept_tiles), .streamed_tiles(streamed_tiles), .block(block), .chunk(chunk), .chunks(chunks),
    .keeps_left(keeps_left[0]), .reloads(reloads[0]), .spills(spills[0]), .left_half(left_half), .top_half(top_half),
    .rate(rate), .per(per), .result_words(result_words), .shift(shift),
    .left_m(turned ? second_n : first_m), .left_k(turned ? second_k : first_k),
    .top_n(turned ? first_m : second_n), .top_k(turned ? first_k : second_k),
    .result_m(turned ? 1 : n), .result_n(turned ? n : 1),
    .space(space), .address(address), .write(write), .write_data(write_data), .read_data(read_data), .busy(busy),
    .total_cycles(total_cycles), .compute_cycles(compute_cycles), .stall_cycles(stall_cycles), .folds(folds),
    .left_reads(left_reads), .top_reads(top_reads), .result_writes(result_writes), .left_words(left_words),
    .top_words(top_words), .result_words_out(result_words_out), .partial_words(partial_words));

  always #5 clk = !clk;

  // DRAM
  integer w;
  always @* for (w = 0; w < `BUS; w = w + 1)
    read_data[w*`SUM +: `SUM] = space == 2 ? results[address[w*32 +: 22]]
      : (space == 1) != turned ? {{(`SUM-`WIDTH){1'b0}}, second[address[w*32 +: 22]]}
      : {{(`SUM-`WIDTH){1'b0}}, first[address[w*32 +: 22]]};
  always @(posedge clk) for (w = 0; w < `BUS; w = w + 1)
    if (write[w]) results[address[w*32 +: 22]] <= write_data[w*`SUM +: `SUM];

  initial begin
    if (!$value$plusargs("dir=%s", dir)) dir = ".";
    if (!$value$plusargs("m=%d", m)) m = `M;
    if (!$value$plusargs("n=%d", n)) n = `N;
    if (!$value$plusargs("k=%d", k)) k = `K;
    if (!$value$plusargs("turned=%d", turned)) turned = `KEPT == 2;
    if (!$value$plusargs("ta=%d", ta)) ta = 0;
    if (!$value$plusargs("tb=%d", tb)) tb = 0;
    if (!$value$plusargs("kept_tiles=%d", kept_tiles)) kept_tiles = `KEPT_TILES;
    if (!$value$plusargs("streamed_tiles=%d", streamed_tiles)) streamed_tiles = `STREAMED_TILES;
    if (!$value$plusargs("block=%d", block)) block = `BLOCK;
    if (!$value$plusargs("chunk=%d", chunk)) chunk = `CHUNK;
    if (!$value$plusargs("chunks=%d", chunks)) chunks = `CHUNKS;
    if (!$value$plusargs("keeps_left=%d", keeps_left)) keeps_left = `KEEPS_LEFT;
    if (!$value$plusargs("reloads=%d", reloads)) reloads = `RELOADS;
    if (!$value$plusargs("spills=%d", spills)) spills = `SPILLS;
    if (!$value$plusargs("left_half=%d", left_half)) left_half = `LEFT_HALF;
    if (!$value$plusargs("top_half=%d", top_half)) top_half = `TOP_HALF;
    if (!$value$plusargs("rate=%d", rate)) rate = `RATE;
    if (!$value$plusargs("per=%d", per)) per = `PER;
    if (!$value$plusargs("result_words=%d", result_words)) result_words = `RESULT_WORDS;
    if (!$value$plusargs("shift=%d", shift)) shift = 8;
    if (rate > `BUS * per) $fatal(1, "a bus of %0d words is narrower than %0d / %0d words a cycle", `BUS, rate, per);
    if (left_half > `LEFT_HALF || top_half > `TOP_HALF)
      $fatal(1, "half a bank holds %0d and %0d numbers", `LEFT_HALF, `TOP_HALF);
    $readmemh({dir, "/first.hex"}, first, 0, m*k-1);
    $readmemh({dir, "/second.hex"}, second, 0, k*n-1);
    $readmemh({dir, "/expected.hex"}, expected, 0, m*n-1);
    first_m = ta ? 1 : k; first_k = ta ? m : 1;
    second_k = tb ? 1 : n; second_n = tb ? k : 1;
    rows = turned ? n : m;
    cols = turned ? m : n;
    @(negedge clk) reset = 0;
    repeat (`ROWS + `COLS) @(negedge clk);   // flags of before the reset leave the array
    start = 1;
    @(negedge clk) start = 0;
    while (busy) begin
      @(negedge clk) waited = waited + 1;
      if (waited > 50000000) $fatal(1, "it does not end");
    end
    for (i = 0; i < m; i = i + 1) for (j = 0; j < n; j = j + 1) begin
      wanted = expected[i*n + j];
      if (result_words == 1) begin
        wanted = wanted >>> shift;
        if (wanted > (1 << (`WIDTH-1)) - 1) wanted = (1 << (`WIDTH-1)) - 1;
        if (wanted < -(1 << (`WIDTH-1))) wanted = -(1 << (`WIDTH-1));
      end
      if (results[i*n + j] !== wanted) wrong = wrong + 1;
    end
    $display("total_cycles %0d compute_cycles %0d stall_cycles %0d folds %0d", total_cycles, compute_cycles,
      stall_cycles, folds);
    $display("first_reads %0d second_reads %0d result_writes %0d", turned ? top_reads : left_reads,
      turned ? left_reads : top_reads, result_writes);
    $display("first_words %0d second_words %0d result_words %0d partial_words %0d wrong %0d",
      turned ? top_words : left_words, turned ? left_words : top_words, result_words_out, partial_words, wrong);
    if (wrong != 0) $fatal(1, "results differ");
    $finish;
  end
endmodule
