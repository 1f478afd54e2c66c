//! Bodies: differences between JSON parsers, and Unicode.
