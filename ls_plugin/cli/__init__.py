"""Console scripts: fairseq's commands with the plugin loaded, and errors in one line."""
