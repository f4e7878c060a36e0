"""Speed, memory and bytes beside the peers: ratios within one run, never absolute claims."""
