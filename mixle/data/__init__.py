"""Where training data comes from: token arrays and files, windows over them, and who trains which when."""
