# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible router before prefill and decode servers of vLLM and SGLang:
python -m kvd.router. It needs aiohttp: pip install 'aiohttp>=3.10'."""
