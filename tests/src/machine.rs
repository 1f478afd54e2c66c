//! A machine of its own for commands that people run as they are written: everything that this host
//! has, a home folder without files, a network with the hosts of a test, and nothing that is written
//! outlives it.
//!
//! It needs root, `unshare` (Debian's util-linux) and `ip` (iproute2), and a system that allows
//! namespaces and overlays: many containers do not.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// The time after which a script is ended because something in it waits for ever, in seconds.
const PATIENCE_S: &str = "240";

/// Where the folder that scripts start in is.
pub const HOME: &str = "/root/new";

/// What goes before each script: `until_ok COMMAND` repeats a command until it succeeds, and
/// `on HOST COMMAND` runs one with the network of another host.
const PRELUDE: &str = r#"set -eu
cd "$HOME"
until_ok() { until "$@" >/dev/null 2>&1; do sleep 0.05; done; }
on() {
    network=/run/netns/$1
    shift
    nsenter --net="$network" "$@"
}
host() { # host ADDRESS: another host, which reaches all others by way of this machine
    ip netns add "$1"
    ip link add "to-$1" type veth peer name eth0 netns "$1"
    ip address add "${1%.*}.254/24" dev "to-$1"
    ip link set "to-$1" up
    on "$1" ip link set lo up
    on "$1" ip address add "$1/24" dev eth0
    on "$1" ip link set eth0 up
    on "$1" ip route add default via "${1%.*}.254"
}
echo 1 >/proc/sys/net/ipv4/ip_forward
for address in $HOSTS; do host "$address"; done
"#;

/// Makes the machine in the namespaces of `unshare`, and runs a script in it.
const ENTER: &str = r#"set -eu
files=$1 place=$2 hosts=$3
mount -t tmpfs tmpfs "$place"
mkdir "$place/upper" "$place/work" "$place/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$place/upper,workdir=$place/work" "$place/root"
cp -a "$files/." "$place/root/"
mount -t proc proc "$place/root/proc"
mount --rbind /dev "$place/root/dev"
ip link set lo up
exec chroot "$place/root" /usr/bin/env -i HOME=/root/new HOSTS="$hosts" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh /root/script
"#;

/// A machine that is made anew for each script.
pub struct Machine {
    folder: TempDir,
    hosts: Vec<&'static str>,
}

impl Machine {
    /// A machine that reaches hosts at these addresses, each of which is in another network of 256.
    /// `None`, with a line that says why, if the system allows no such machine.
    pub fn with_hosts(hosts: &[&'static str]) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(folder.path().join("place")).expect("a folder");
        let machine = Self { folder, hosts: hosts.to_vec() };
        fs::create_dir_all(machine.path(HOME)).expect("a folder");
        // Those of the host are not on this network.
        machine.write("/etc/resolv.conf", "");
        match machine.try_run("true") {
            Ok(_) => Some(machine),
            Err(why) => {
                let line = format!("SKIPPED: no machine can be made here: {why}\n");
                std::io::stderr().write_all(line.as_bytes()).expect("standard error");
                None
            }
        }
    }

    /// Where a file of the machine is made ready; its folder exists.
    pub fn path(&self, path: &str) -> PathBuf {
        let path = self.folder.path().join("files").join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        path
    }

    /// Gives the machine a file.
    pub fn write(&self, path: &str, text: &str) {
        fs::write(self.path(path), text).expect("a file");
    }

    /// Gives the machine a program in `/usr/local/bin`, as a script.
    pub fn command(&self, name: &str, script: &str) {
        let path = format!("/usr/local/bin/{name}");
        self.write(&path, script);
        fs::set_permissions(self.path(&path), fs::Permissions::from_mode(0o755)).expect("a mode");
    }

    /// Gives the machine a program of the host in `/usr/local/bin`.
    pub fn install(&self, program: &Path) {
        let name = program.file_name().expect("a name").to_string_lossy();
        self.command(&name, &format!("#!/bin/sh\nexec {} \"$@\"\n", program.display()));
    }

    /// Runs a script, and returns what it prints. Its processes end with it.
    ///
    /// # Panics
    /// If a command of the script fails.
    pub fn run(&self, script: &str) -> String {
        self.try_run(script).unwrap_or_else(|why| panic!("{why}\n{script}"))
    }

    fn try_run(&self, script: &str) -> Result<String, String> {
        self.write("/root/script", &format!("{PRELUDE}{script}"));
        let files = self.folder.path().join("files");
        let ran = Command::new("timeout")
            .args(["--kill-after=1", PATIENCE_S, "unshare", "--net", "--mount", "--pid", "--fork"])
            .args(["--kill-child", "sh", "-c", ENTER, "enter"])
            .args([&files, &self.folder.path().join("place")])
            .arg(self.hosts.join(" "))
            .output()
            .map_err(|error| format!("timeout: {error}"))?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let (printed, said) = (text(&ran.stdout), text(&ran.stderr));
        match ran.status.success() {
            true => Ok(printed),
            false => Err(format!("{}\n{printed}\n{said}", ran.status)),
        }
    }
}
