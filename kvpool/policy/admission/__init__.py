"""WHO may begin, and when: fairness between tenants, priorities, one computation for many who want the same, trust in workers. Pure."""
