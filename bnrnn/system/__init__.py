"""What other rooms need from the operating system: files, locks, processes and memory."""
