"""Uploads the final model to the Hugging Face hub."""

from pathlib import Path


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a model repository, created (private) if it does not exist; return a line on the result.

    The token is the one of ``hf auth login`` or ``HF_TOKEN``. A failure is no error: the model is on the disk.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload model trained with ftmon")
    except Exception as error:  # network, hub, token and name errors have classes of their own
        why = (str(error).strip() or repr(error)).splitlines()[0]
        return (
            f"note: the model could not be pushed to {repository}: {why}; it is whole in {folder}: "
            f"hf upload {repository} {folder}"
        )
    return f"pushed to {api.endpoint}/{repository}"
