"""One file per op: ``cases(device, dtype)`` yields what stock fairseq executes beside the fused op, see op_timing.Case."""
