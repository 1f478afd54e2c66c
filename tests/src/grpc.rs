//! A gRPC client of the front door.

use std::net::SocketAddr;

use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use splitrail_proto::v1;
use splitrail_proto::v1::front_door_service_client::FrontDoorServiceClient;
use splitrail_proto::v1::generate_response::Event;
use tonic::body::Body;

/// A client over plain HTTP/2.
pub type FrontDoor = FrontDoorServiceClient<Client<HttpConnector, Body>>;

/// A client of `address`.
pub fn grpc_client(address: SocketAddr) -> FrontDoor {
    let http = Client::builder(TokioExecutor::new()).http2_only(true).build(HttpConnector::new());
    let origin = format!("http://{address}").parse().expect("an origin");
    FrontDoorServiceClient::with_origin(http, origin)
        .max_encoding_message_size(usize::MAX)
        .max_decoding_message_size(usize::MAX)
}

/// All events of a call.
///
/// # Errors
/// The status with which the call failed.
pub async fn generate(
    address: SocketAddr,
    request: v1::GenerateRequest,
) -> Result<Vec<Event>, tonic::Status> {
    let mut stream = grpc_client(address).generate(request).await?.into_inner();
    let mut events = Vec::new();
    while let Some(response) = stream.message().await? {
        events.extend(response.event);
    }
    Ok(events)
}

/// A call with a text prompt and further fields.
pub fn text_request(text: &str, extra_body_json: &str) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: "sim".into(),
        prompt: Some(v1::generate_request::Prompt::Text(text.into())),
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(4),
            temperature: Some(0.0),
            ..Default::default()
        }),
        extra_body_json: extra_body_json.into(),
        ..Default::default()
    }
}
