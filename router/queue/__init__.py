"""What happens to a request before a worker gets it: it follows who computes the same, stands in line, has its blocks fetched."""
