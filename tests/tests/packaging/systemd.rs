//! The systemd units, as `systemd-analyze` sees them: free of unknown keys, and as hardened as they
//! are said to be. Without the program (Debian's package `systemd`), these tests say that they
//! prove nothing.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use splitrail_tests::binary::built;

const UNITS: [&str; 2] = ["splitrail.service", "splitrail-shim.service"];
/// The highest exposure that a unit may have, in tenths: below 2.0 is "OK" to systemd.
const EXPOSURE_MAX_TENTHS: &str = "20";

/// The units in a folder, with the programs that were built, beside a unit of an engine.
fn units(folder: &Path) {
    for unit in UNITS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd").join(unit);
        let text = fs::read_to_string(path).unwrap();
        let program = built(unit.trim_end_matches(".service")).display().to_string();
        let packaged = format!("ExecStart=/usr/bin/{} ", unit.trim_end_matches(".service"));
        assert!(text.contains(&packaged), "{unit}");
        fs::write(folder.join(unit), text.replace(&packaged, &format!("ExecStart={program} ")))
            .unwrap();
    }
    fs::write(folder.join("vllm.service"), "[Service]\nExecStart=/bin/true\n").unwrap();
}

/// What `systemd-analyze` says; nothing if it is not installed.
fn analyze(folder: &Path, args: &[&str]) -> Option<Output> {
    match Command::new("systemd-analyze").args(args).current_dir(folder).output() {
        Ok(output) => Some(output),
        Err(error) => {
            let mut stderr = std::io::stderr();
            let text = format!("SKIPPED: systemd-analyze cannot be started: {error}\n");
            std::io::Write::write_all(&mut stderr, text.as_bytes()).unwrap();
            None
        }
    }
}

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn systemd_knows_everything_in_the_units() {
    let folder = tempfile::tempdir().unwrap();
    units(folder.path());
    for unit in UNITS {
        let unit = format!("./{unit}");
        let Some(verified) = analyze(folder.path(), &["verify", &unit]) else { return };
        // An unknown key is only told of, and the status is 0.
        assert!(verified.status.success() && said(&verified).is_empty(), "{}", said(&verified));
    }
}

#[test]
fn the_units_are_hardened() {
    let folder = tempfile::tempdir().unwrap();
    units(folder.path());
    for unit in UNITS {
        let unit = format!("./{unit}");
        let threshold = format!("--threshold={EXPOSURE_MAX_TENTHS}");
        let args = ["security", "--offline=yes", "--no-pager", &threshold, &unit];
        let Some(rated) = analyze(folder.path(), &args) else { return };
        assert!(rated.status.success(), "{}", said(&rated));
    }
}
