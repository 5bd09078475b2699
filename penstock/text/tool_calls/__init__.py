"""Tool calls in the text that models write: for each format a parser and a grammar, in a file of its own."""
