"""Whether a trainer clips and adds noise as it says, found from outside; `checks` begins it."""
