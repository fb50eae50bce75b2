"""What all tests share: seeds that move with the commit, CPU time, commands in forked processes."""
