"""Speed-up reports and the estimate without a GPU: the subcommands of ``lightseq-report``, a file each, and what they stand on."""
