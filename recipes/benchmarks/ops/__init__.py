"""One file per op: ``cases(device)`` yields what stock fairseq executes beside the fused op, forward and backward."""
