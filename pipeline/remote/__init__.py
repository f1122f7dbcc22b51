"""The remote: objects of S3, GCS, Azure and HTTP servers, and files of the Hugging Face Hub."""
