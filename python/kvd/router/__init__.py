# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible router in front of prefill and decode servers of vLLM and SGLang:
python -m kvd.router. It needs aiohttp: pip install 'aiohttp>=3.10'."""
