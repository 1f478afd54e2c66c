//! Splitrail's protocol buffers and the code made from them. No logic lives here.
//!
//! The definitions and their meaning are in `splitrail/v1/*.proto`.

mod json;

/// Package `splitrail.v1`.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::missing_errors_doc,
    clippy::too_many_lines,
    clippy::unwrap_used
)]
pub mod v1 {
    tonic::include_proto!("splitrail.v1");
}

/// All definitions of this crate as an encoded `google.protobuf.FileDescriptorSet`,
/// for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    /// Every name that a reflecting client would see in the descriptors.
    fn readable_text() -> String {
        String::from_utf8_lossy(FILE_DESCRIPTOR_SET).into_owned()
    }

    #[test]
    fn reflection_descriptors_name_the_service_and_its_file() {
        let text = readable_text();
        for name in
            ["splitrail/v1/front_door.proto", "FrontDoorService", "cached_source", "FleetService"]
        {
            assert!(text.contains(name), "{name} is missing");
        }
    }

    #[test]
    fn an_absent_cached_figure_differs_from_zero_on_the_wire() {
        let absent = v1::Usage { prompt_tokens: 5, ..Default::default() };
        let zero = v1::Usage { cached_tokens: Some(0), ..absent };
        let read = |usage: &v1::Usage| v1::Usage::decode(usage.encode_to_vec().as_slice());
        assert_eq!(read(&absent).map(|u| u.cached_tokens), Ok(None));
        assert_eq!(read(&zero).map(|u| u.cached_tokens), Ok(Some(0)));
    }
}
