//! The two programs as their users run them: commands that need no cluster, arguments from the
//! environment, colours, and the notation of configuration files.

mod about;
mod arguments;
mod download;
mod health;
mod init;
mod notation;
mod support;
