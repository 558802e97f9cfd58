-- pre: anchors of a chain are numbered, each names the one before it, and one is made every day even if nothing moved.
alter table audit_heads
    -- The number of the last anchor, and SHA-256 of its line.
    add column anchor_number bigint not null default 0,
    add column anchor_line text not null default '',
    -- When the last anchor was written.
    add column beat_at timestamptz;
