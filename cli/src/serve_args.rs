//! The arguments of `splitrail serve`: a configuration file, or one model by flags.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args};
use splitrail_config::{ConfigText, Flags, LoadedConfig, Problems};

/// What to serve.
#[derive(Args)]
#[command(group(ArgGroup::new("what").required(true).args(["config", "model"])))]
pub(crate) struct ServeArgs {
    /// The configuration file.
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Serves one model without a file: the name under which the engines serve it.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The URL of a prefill engine; repeatable, and separable by commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', requires = "model")]
    prefill: Vec<String>,
    /// The URL of a decode engine; repeatable, and separable by commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', requires = "model")]
    decode: Vec<String>,
    /// The URL of an engine that does both parts; repeatable, and separable by commas.
    #[arg(long, value_name = "URL", value_delimiter = ',', requires = "model")]
    worker: Vec<String>,
    /// The model's folder, or its id in the Hugging Face cache of this host, or `engine` (engines
    /// are asked for tokens), or `none`. Without it, the name of the model is looked up there.
    #[arg(long, value_name = "FOLDER|ID", requires = "model")]
    tokenizer: Option<String>,
    /// The address of the OpenAI API; 0.0.0.0:8000 by default.
    #[arg(long, value_name = "IP:PORT", requires = "model")]
    listen: Option<SocketAddr>,
    /// The address of the admin listener; 127.0.0.1:9090 by default.
    #[arg(long, value_name = "IP:PORT", requires = "model")]
    admin: Option<SocketAddr>,
    /// Reloads the configuration when the content of its file has changed.
    #[arg(long, requires = "config")]
    pub(crate) reload_on_change: bool,
    /// A JSON file with addresses and models that is written once everything is bound.
    #[arg(long)]
    pub(crate) ready_file: Option<PathBuf>,
}

impl ServeArgs {
    /// Reads and checks the configuration.
    ///
    /// # Errors
    /// All mistakes in the file or in the flags.
    pub(crate) fn load(&self) -> Result<LoadedConfig, Problems> {
        let text = match &self.config {
            Some(file) => ConfigText::read(file)?,
            None => ConfigText::of_flags(self.flags()),
        };
        text.load(splitrail_router::PARTS)
    }

    fn flags(&self) -> Flags {
        Flags {
            model: self.model.clone().unwrap_or_default(),
            prefill: self.prefill.clone(),
            decode: self.decode.clone(),
            workers: self.worker.clone(),
            tokenizer: self.tokenizer.clone(),
            listen: self.listen,
            admin: self.admin,
        }
    }
}
