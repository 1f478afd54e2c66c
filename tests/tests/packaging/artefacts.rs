//! `release/package`: the same programs make the same bytes, and each artefact has what it must have.
//! Here the programs are small ones of the system; a release starts what it has made.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What a command prints; it must succeed.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {printed}{said}");
    printed
}

/// Makes all artefacts of a folder of programs.
fn package(programs: &Path, made: &Path) {
    output(
        Command::new("python3")
            .arg(root().join("release/package"))
            .arg("--no-verify")
            .arg("--programs")
            .arg(programs)
            .arg("--output")
            .arg(made)
            // A time that no clock shows.
            .env("SOURCE_DATE_EPOCH", "1700000000"),
    );
}

fn names(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// The only artefact with such a name.
fn artefact(folder: &Path, end: &str) -> PathBuf {
    let names: Vec<String> = names(folder).into_iter().filter(|name| name.ends_with(end)).collect();
    assert_eq!(names.len(), 1, "{end}: {names:?}");
    folder.join(&names[0])
}

fn listed(command: &mut Command, wanted: &[&str]) {
    let listed = output(command);
    for name in wanted {
        assert!(listed.contains(name), "{name} is not in\n{listed}");
    }
}

#[test]
fn the_same_programs_make_the_same_bytes_and_every_artefact_is_whole() {
    let files = tempfile::tempdir().unwrap();
    let programs = files.path().join("programs");
    fs::create_dir(&programs).unwrap();
    fs::copy("/bin/true", programs.join("splitrail")).unwrap();
    fs::copy("/bin/false", programs.join("splitrail-shim")).unwrap();
    let (first, second) = (files.path().join("first"), files.path().join("second"));
    package(&programs, &first);
    package(&programs, &second);
    assert_eq!(names(&first), names(&second));
    for name in names(&first) {
        let same = fs::read(first.join(&name)).unwrap() == fs::read(second.join(&name)).unwrap();
        assert!(same, "{name} differs");
    }
    output(Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(&first));
    let summed = fs::read_to_string(first.join("SHA256SUMS")).unwrap().lines().count();
    assert_eq!(summed, 6, "artefacts: an archive, two bills, a wheel, a package, an image");

    let archive = artefact(&first, "-unknown-linux-gnu.tar.gz");
    let wanted = ["/splitrail\n", "/splitrail-shim\n", "/LICENSE", "/THIRD-PARTY-LICENSES.txt"];
    listed(Command::new("tar").arg("tzf").arg(archive), &wanted);

    let wheel = artefact(&first, ".whl");
    let record = format!("splitrail-{VERSION}.dist-info/RECORD");
    let checked = output(Command::new("python3").args(["-c", WHEEL]).arg(&wheel).arg(&record));
    assert!(checked.trim().parse::<u32>().unwrap() >= 8, "files: {checked}");

    let package = artefact(&first, ".deb");
    let version = ["--field", &package.display().to_string(), "Version"].map(str::to_owned);
    assert_eq!(output(Command::new("dpkg-deb").args(version)).trim(), format!("{VERSION}-1"));
    let wanted = [
        " ./usr/bin/splitrail\n",
        " ./usr/bin/splitrail-shim\n",
        " ./etc/splitrail/splitrail.yaml\n",
        "/systemd/system/splitrail.service\n",
        "/systemd/system/splitrail-shim.service\n",
        "/copyright\n",
    ];
    listed(Command::new("dpkg-deb").arg("--contents").arg(package), &wanted);

    let image = artefact(&first, ".oci.tar");
    let layers = output(Command::new("python3").args(["-c", IMAGE]).arg(image));
    for path in ["usr/local/bin/splitrail", "usr/local/bin/splitrail-shim", "tmp", "etc/passwd"] {
        assert!(layers.lines().any(|line| line == path), "{path} is not in\n{layers}");
    }
    assert!(layers.contains("etc/ssl/certs/ca-certificates.crt"), "{layers}");
}

/// Compares each file of a wheel with its list of files, and prints their number.
const WHEEL: &str = r#"
import base64, hashlib, sys, zipfile
wheel, record = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
lines = [line.rsplit(",", 2) for line in wheel.read(record).decode().splitlines()]
assert sorted(name for name, _, _ in lines) == sorted(wheel.namelist()), lines
for name, digest, size in lines:
    data = wheel.read(name)
    expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert name == record or (digest, size) == ("sha256=" + expected, str(len(data))), name
scripts = [one for one in wheel.infolist() if ".data/scripts/" in one.filename]
assert len(scripts) == 2 and all(one.external_attr >> 16 & 0o111 for one in scripts), scripts
print(len(lines))
"#;

/// Follows an image from its index to the layers, compares all digests, and prints the paths.
const IMAGE: &str = r#"
import gzip, hashlib, io, json, sys, tarfile
image = tarfile.open(sys.argv[1])
def blob(pointer):
    data = image.extractfile("blobs/" + pointer["digest"].replace(":", "/")).read()
    assert "sha256:" + hashlib.sha256(data).hexdigest() == pointer["digest"], pointer
    assert len(data) == pointer["size"], pointer
    return data
manifest = json.loads(blob(json.load(image.extractfile("index.json"))["manifests"][0]))
config = json.loads(blob(manifest["config"]))
assert config["config"]["User"] == "65532:65532", config
for pointer, digest in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
    layer = gzip.decompress(blob(pointer))
    assert "sha256:" + hashlib.sha256(layer).hexdigest() == digest, digest
    print("\n".join(tarfile.open(fileobj=io.BytesIO(layer)).getnames()))
"#;
