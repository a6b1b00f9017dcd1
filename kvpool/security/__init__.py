"""WHO may do what, and how much of it: tokens, principals, tenants, salts, the audit log. Files and plain values; no network."""
