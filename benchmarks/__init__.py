"""Speed beside its peers: ratios within one run, never absolute claims."""
