//! The two programs as their users run them: commands that need no cluster, arguments from the
//! environment, colours, and the notation of configuration files.

mod about;
mod arguments;
mod health;
mod notation;
mod support;
