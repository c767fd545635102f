"""What `import verst` offers to Python programs: runs, their events, and the parts to build a loop of one's own."""
