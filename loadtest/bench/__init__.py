"""Side-by-side cost of Radixgate and its peers: CPU time per unit, as a ratio to nginx."""
