"""What is fuzzed, a module each: `run(data)` takes what a fuzzer made, and `seeds()` gives what it begins with."""
