// Computes one product and compares it: first.hex (M x K), second.hex (K x N) and expected.hex (M x N), row by row.
// +m=.. +n=.. +k=.. say the sizes, +dir=.. where the files are. Prints one line of counts, and ends in an error where a
// result differs.
`include "parameters.vh"
module testbench;
  localparam STATIONARY = `KEPT != 0;
  reg clk = 0, reset = 1, start = 0, load_left = 0, load_top = 0;
  reg [31:0] load_bank = 0, result_bank = 0;
  reg [`ADDRESS-1:0] load_address = 0, result_address = 0;
  reg signed [`WIDTH-1:0] load_data = 0;
  wire signed [`SUM-1:0] result_data;
  wire busy;
  wire [63:0] compute_cycles, busy_cycles, folds, left_reads, top_reads, result_writes;
  integer m, n, k, rows, cols, i, j, wrong = 0;
  reg [8*256-1:0] dir;
  reg signed [`WIDTH-1:0] first [0:(1<<22)-1];
  reg signed [`WIDTH-1:0] second [0:(1<<22)-1];
  reg signed [`SUM-1:0] expected [0:(1<<22)-1];
  reg signed [`SUM-1:0] wanted;

  accelerator #(.ROWS(`ROWS), .COLS(`COLS), .WIDTH(`WIDTH), .SUM(`SUM), .STATIONARY(STATIONARY), .ADDRESS(`ADDRESS)) dut (
    .clk(clk), .reset(reset), .start(start), .m(rows), .n(cols), .k(k),
    .load_left(load_left), .load_top(load_top), .load_bank(load_bank), .load_address(load_address),
    .load_data(load_data), .result_bank(result_bank), .result_address(result_address), .result_data(result_data),
    .busy(busy), .compute_cycles(compute_cycles), .busy_cycles(busy_cycles), .folds(folds),
    .left_reads(left_reads), .top_reads(top_reads), .result_writes(result_writes));

  always #5 clk = !clk;

  initial begin
    if (!$value$plusargs("dir=%s", dir)) dir = ".";
    if (!$value$plusargs("m=%d", m)) m = `M;
    if (!$value$plusargs("n=%d", n)) n = `N;
    if (!$value$plusargs("k=%d", k)) k = `K;
    $readmemh({dir, "/first.hex"}, first, 0, m*k-1);
    $readmemh({dir, "/second.hex"}, second, 0, k*n-1);
    $readmemh({dir, "/expected.hex"}, expected, 0, m*n-1);
    rows = `KEPT == 2 ? n : m;   // is: the transposed product
    cols = `KEPT == 2 ? m : n;
    @(negedge clk) reset = 0;
    load_left = 1;
    for (i = 0; i < rows; i = i + 1) for (j = 0; j < k; j = j + 1) begin
      load_data = `KEPT == 2 ? second[j*n + i] : first[i*k + j];
      load_bank = STATIONARY ? j % `ROWS : i % `ROWS;
      load_address = STATIONARY ? (j / `ROWS) * rows + i : (i / `ROWS) * k + j;
      @(negedge clk);
    end
    load_left = 0;
    load_top = 1;
    for (i = 0; i < cols; i = i + 1) for (j = 0; j < k; j = j + 1) begin
      load_data = `KEPT == 2 ? first[i*k + j] : second[j*n + i];
      load_bank = i % `COLS;
      load_address = (i / `COLS) * k + j;
      @(negedge clk);
    end
    load_top = 0;
    repeat (`ROWS + `COLS) @(negedge clk);   // flags of before the reset leave the array
    start = 1;
    @(negedge clk) start = 0;
    while (busy) @(negedge clk);
    for (i = 0; i < rows; i = i + 1) for (j = 0; j < cols; j = j + 1) begin
      result_bank = j % `COLS;
      result_address = (j / `COLS) * rows + i;
      @(negedge clk);
      wanted = `KEPT == 2 ? expected[j*n + i] : expected[i*n + j];
      if (result_data !== wanted) wrong = wrong + 1;
    end
    $display("compute_cycles %0d busy_cycles %0d folds %0d first_reads %0d second_reads %0d result_writes %0d wrong %0d",
      compute_cycles, busy_cycles, folds, `KEPT == 2 ? top_reads : left_reads, `KEPT == 2 ? left_reads : top_reads,
      result_writes, wrong);
    if (wrong != 0) $fatal(1, "results differ");
    $finish;
  end
endmodule
