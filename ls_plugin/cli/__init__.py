"""Console scripts: fairseq's commands with the plugin loaded, and errors told in one line."""
