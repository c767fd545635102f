"""The live page of runs, and the same page as one file. Reads run folders and nothing else. No torch."""
