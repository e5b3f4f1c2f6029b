# SPDX-License-Identifier: Apache-2.0
"""Where bytes lie: the region, its page tables, the windows onto it, and the copy engine."""
