-- pre: keys have scopes, say when they were last used, and are stored as keyed hashes.
alter table api_keys
    -- By which pepper `hash` was made: the id of a master key, or `cluster`. Null: by none, a plain SHA-256.
    add column hashed_by text,
    -- `jobs` (patterns of names), `tags` (key:value) and `pools`; null: all there are.
    add column scopes jsonb,
    -- Of a worker key: the tenants that it may serve; null: all.
    add column serves int[],
    -- Right to some minutes.
    add column last_used_at timestamptz;

grant update (expires_at) on api_keys to tocsin_app;
-- The same of the workers that use it, for whoever asks why nobody takes a run.
alter table workers add column serves int[];

-- A key that is kept to some jobs sees their rows alone: `tocsin.scope` is what their names fit, `tocsin.scope_tags` a JSON
-- array of tags of which one is enough. Neither is set for other keys, and then none of this is looked at.
create policy scope on jobs as restrictive to tocsin_app
    using (coalesce(current_setting('tocsin.scope', true), '') = ''
           or coalesce(name ~ current_setting('tocsin.scope', true), false)
           or coalesce(tags @> any (array(
                  select jsonb_array_elements(current_setting('tocsin.scope_tags', true)::jsonb))), false));

-- Opaque to the planner on purpose: a subquery in the policy would be planned with every statement of every caller.
create function job_in_scope(job uuid) returns boolean language plpgsql stable as $$
begin
    return exists (
        select from tocsin.jobs j
         where j.tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int and j.id = job);
end $$;

do $$
declare t text;
begin
    foreach t in array array['job_versions', 'triggers', 'holds', 'runs', 'history', 'dead_letters', 'run_counts',
                             'unclaimed']
    loop
        execute format($p$create policy scope on %I as restrictive to tocsin_app
            using (coalesce(current_setting('tocsin.scope', true), '') = '' or job_in_scope(job_id))$p$, t);
    end loop;
end $$;
