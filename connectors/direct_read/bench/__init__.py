# SPDX-License-Identifier: Apache-2.0
"""What direct reads cost, beside the engine that they read from."""
