"""What a decode reads of its context: techniques that leave tokens out, exact sums of partial attentions, and what that taints."""
