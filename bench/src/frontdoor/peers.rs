//! The peers that the router is compared with: nginx as a plain proxy, and another router if it is
//! installed.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use super::Failure;
use super::engines::Engines;
use super::mock::Mock;
use super::targets::{Target, wait_until_ok};
use super::tls::Certificate;
use crate::fleet::process::{Process, free_ports};

impl Target {
    /// Starts nginx as a plain proxy. Streams have a server of their own, which does not buffer.
    /// With a certificate, the server for whole replies uses TLS.
    ///
    /// # Errors
    /// nginx is not installed or does not become ready.
    pub(super) async fn nginx(
        engines: &Engines,
        certificate: Option<&Certificate>,
        folder: &Path,
    ) -> Result<Self, Failure> {
        let [whole, streams] = free_ports()?;
        let name = if certificate.is_some() { "nginx tls" } else { "nginx" };
        let path = folder.join(format!("{name}.conf"));
        fs::write(&path, nginx(engines, certificate, folder, [whole, streams]))?;
        let tls = certificate.map(Certificate::connector).transpose()?;
        let path = path.to_string_lossy();
        let error_log = folder.join("nginx-early.log");
        let args = ["-c", &path, "-e", &error_log.to_string_lossy()];
        let process = Process::start(Path::new("nginx"), name, folder, &args, "warn")?;
        let process = Some(wait_until_ok(process, folder, streams, "/health").await?);
        let (admin, grpc) = (None, None);
        Ok(Self { name, whole, streams, admin, grpc, process, checks_worker: false, tls })
    }

    /// Starts vllm-router with the policy `round_robin`: in front of aggregated engines, or with
    /// `split` in front of prefill and decode engines.
    ///
    /// # Errors
    /// vllm-router cannot be started or does not become ready.
    pub(super) async fn vllm_router(
        split: bool,
        engines: &Engines,
        program: &Path,
        folder: &Path,
    ) -> Result<Self, Failure> {
        let name = if split { "vllm-router pd" } else { "vllm-router" };
        let [whole, metrics] = free_ports()?;
        let (port, metrics) = (whole.port().to_string(), metrics.port().to_string());
        let mut args = vec!["--host", "127.0.0.1", "--port", &port, "--policy", "round_robin"];
        args.extend(["--prometheus-port", &metrics, "--log-level", "warning"]);
        let urls = |mocks: &[Mock]| -> Vec<String> {
            mocks.iter().map(|mock| format!("http://{}", mock.address)).collect()
        };
        let [all, prefill, decode] =
            [&engines.aggregated, &engines.prefill, &engines.decode].map(|mocks| urls(mocks));
        if split {
            args.extend(["--vllm-pd-disaggregation", "--kv-connector", "nixl"]);
            args.extend(prefill.iter().flat_map(|url| ["--prefill", url]));
            args.extend(decode.iter().flat_map(|url| ["--decode", url]));
        } else {
            args.push("--worker-urls");
            args.extend(all.iter().map(String::as_str));
        }
        let process = Process::start(program, name, folder, &args, "warn")?;
        let process = Some(wait_until_ok(process, folder, whole, "/health").await?);
        let (streams, admin, grpc, tls) = (whole, None, None, None);
        Ok(Self { name, whole, streams, admin, grpc, process, checks_worker: false, tls })
    }
}

fn nginx(
    engines: &Engines,
    certificate: Option<&Certificate>,
    folder: &Path,
    [whole, streams]: [SocketAddr; 2],
) -> String {
    let servers: String =
        engines.aggregated.iter().map(|mock| format!("server {}; ", mock.address)).collect();
    let folder = folder.display();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("  {kind}_temp_path {folder}/nginx-{kind};\n"))
        .concat();
    let tls = certificate.map(|Certificate { chain, key, .. }| {
        format!(
            "    ssl_certificate {chain:?};
    ssl_certificate_key {key:?};
    ssl_protocols TLSv1.3;
"
        )
    });
    let (ssl, tls) = tls.map_or(("", String::new()), |tls| (" ssl", tls));
    let server = |address: SocketAddr, ssl: &str, tls: &str, buffering: &str| {
        format!(
            "  server {{
    listen {address}{ssl} backlog=1024;
{tls}    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection \"\";
      proxy_buffering {buffering};
    }}
  }}
"
        )
    };
    format!(
        "worker_processes 2;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log warn;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_body_buffer_size 256k;
  client_max_body_size 64m;
{paths}  tcp_nodelay on;
  keepalive_timeout 600s;
  keepalive_requests 1000000000;
  upstream engines {{ {servers} keepalive 256; keepalive_requests 1000000000; }}
{}{}}}
",
        server(whole, ssl, &tls, "on"),
        server(streams, "", "", "off"),
    )
}
