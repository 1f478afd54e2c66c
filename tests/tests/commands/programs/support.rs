//! Runs the built programs to their end.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use splitrail_tests::binary::built;

pub(crate) const ROUTER: &str = "splitrail";
pub(crate) const SHIM: &str = "splitrail-shim";

/// What a program has left behind.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A run of a program.
pub(crate) struct Run<'r> {
    pub(crate) program: &'r str,
    pub(crate) folder: &'r Path,
    pub(crate) env: &'r [(&'r str, &'r str)],
    pub(crate) input: &'r str,
}

impl Default for Run<'_> {
    fn default() -> Self {
        Self { program: ROUTER, folder: Path::new("."), env: &[], input: "" }
    }
}

impl Run<'_> {
    pub(crate) fn with(&self, arguments: &[&str]) -> Ran {
        let mut child = Command::new(built(self.program))
            .args(arguments)
            .current_dir(self.folder)
            .env_remove("RUST_LOG")
            .envs(self.env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A program that reads nothing may have ended already.
        let _unread = child.stdin.take().unwrap().write_all(self.input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ran {
            code: output.status.code().unwrap(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }
}

/// Runs the router's program.
pub(crate) fn run(arguments: &[&str]) -> Ran {
    Run::default().with(arguments)
}

/// A valid configuration, with any ports.
pub(crate) const CONFIG: &str =
    "listen: { http: 127.0.0.1:0, admin: 127.0.0.1:0, grpc: 127.0.0.1:0 }
models:
  - name: sim
    block_size: 16
    tokenizer: { kind: none }
    flow: aggregated
    workers:
      - { id: w0, role: both, url: \"http://127.0.0.1:1\" }
";
