# SPDX-License-Identifier: Apache-2.0
"""What frontend and backend say to each other: messages, codec, handshake, sockets."""
