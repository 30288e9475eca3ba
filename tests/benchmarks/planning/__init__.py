"""What plans predict beside what real runs of the same programs give."""
