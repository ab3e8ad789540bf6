"""What makes proofs, pages and the site. No user needs it, and no script imports it."""
