//! The two programs as people run them: commands, arguments, configuration files, exit codes.
#![allow(missing_docs, clippy::unwrap_used)]

mod bench;
mod check_connect;
mod five_lines;
mod operator_commands;
mod programs;
mod replay;
mod start_up;
