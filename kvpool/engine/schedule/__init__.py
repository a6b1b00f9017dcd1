"""What is computed next: who waits (`waiting`), who is admitted or preempted, who gets how much of the next pass (`scheduler`). Pure."""
