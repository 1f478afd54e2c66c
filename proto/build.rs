//! Compiles the `.proto` files without an installed `protoc` and keeps the
//! encoded descriptors for gRPC reflection.

use std::path::PathBuf;

use protox::prost::Message;

const PROTO_FILES: &[&str] = &["splitrail/v1/fleet.proto", "splitrail/v1/front_door.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=splitrail");
    let descriptors = protox::compile(PROTO_FILES, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        // Clients bring their own channel; this crate needs no transport for that.
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
